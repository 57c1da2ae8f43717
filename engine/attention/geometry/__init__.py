"""Pure integers: which positions a rank holds, the order of a ring, rectangles of visible pairs.

No torch and no import of any other package.
"""
