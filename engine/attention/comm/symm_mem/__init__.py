"""engine.attention.comm.symm_mem"""
