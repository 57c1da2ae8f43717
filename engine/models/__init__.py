"""One file for each architecture, and the decoder that all of them are.

`architecture` says what such a file holds; `decoder` has the torch code, put together from the features of a shape.
"""
