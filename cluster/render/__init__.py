"""Reports of node checks in every form: text, a live table, HTML."""
