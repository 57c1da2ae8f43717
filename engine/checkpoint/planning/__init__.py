"""`checkpoint: auto`: what is kept for backward, chosen under a memory budget by the time of computing it again.

In the order of reading: `memory_settings` (what can be chosen), `memory` (bytes of a rank), `cost` (seconds of repeated
work), `plan` (the cheapest choice that fits: settings in, settings and their prediction out). Kernels' speeds and
budgets come in as plain numbers. No torch: planning takes milliseconds and runs on a laptop.
"""
