"""The systems that BurstEngine is compared with, one package each: native baselines, the system's parallel attention on
the engine's model and trainer, so that a comparison changes the method alone, and upstream systems, the authors' own
programs.

A package that defines METHOD is found and tested without an entry in any list. Code of the systems is not copied here.
"""
