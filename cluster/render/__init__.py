"""Reports of node checks in every form: text, a live table, HTML.

Imports `health`, `active` and packages below; nothing here reaches a node or judges one.
"""
