"""cluster.files"""
