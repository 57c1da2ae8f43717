"""Systems that `burst conform` knows by name: a file each, as conform/target.py says."""
