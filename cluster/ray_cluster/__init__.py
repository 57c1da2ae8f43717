"""Ray on the nodes of an inventory: started over SSH on healthy nodes with equal versions, and ended completely.

`node_program` is sent to each node's interpreter through standard input: nothing more needs to be installed there, and
no command line holds a secret. A state directory records every process before it starts, so `status` and `down` work
after a crash of `up`. It imports any package below, and only the harness and `cli` import it.
"""
