"""Parts of a decoder layer computed in tiles of tokens: the MLP, and the projections before attention; and attention's
backward in groups of heads.

They replace functions of `engine.models.decoder` and give equal results in less memory. No communication, no choice of
tiles.
"""
