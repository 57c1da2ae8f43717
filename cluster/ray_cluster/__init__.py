"""Ray on the hosts of an inventory: started over SSH on healthy nodes with matching versions, ended without a rest.

A small program (`node_program`) is sent to each node's own interpreter through standard input, so that nothing has to
be installed beside the project and no secret stands in a command line. What was started is written to a state
directory before it is started: `status` and `down` work from there, also after the program that ran `up` has died.
"""
