"""Distributed attention composed from small values: layout, mask, ring, exchange, kernel and backward route."""
