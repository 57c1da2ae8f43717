"""Pure integers: which positions a rank holds, the order of a ring, rectangles of visible pairs.

Positions: a `layout` gives each rank its segments. `balanced` is the layout of packed documents: `dealing` gives ranks
`document_parts`, and `even_out` exchanges some. `shards` holds the segments of all ranks as arrays. Visible pairs:
`rectangles` cuts the regions of a mask by shards, `tile_table` makes tiles of them, and `tiles` kernel calls of these.

No torch and no import of any other package.
"""
