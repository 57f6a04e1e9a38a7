"""Fixtures every tier may use; loaded by `conftest`."""
