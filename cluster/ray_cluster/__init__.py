"""Ray on the nodes of an inventory: `ray start` over SSH on healthy nodes with this machine's software, and its end.

`node_program` is sent to each node's interpreter through standard input: nothing more needs to be installed there, and
no command line holds a secret. Everything that is started on a node carries a mark of the launching machine and state
directory, by which any later `up`, `status` or `down` finds it. Imports any package below, and only the harness
imports it.
"""
