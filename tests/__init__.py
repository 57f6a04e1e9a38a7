"""Tests: one folder per tier, `framework/` for what they share.

A package, so that `tests.framework` cannot be shadowed by some distribution's top-level `tests`.
"""
