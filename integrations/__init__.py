"""Adapters between torch_mooncake and the programs that serve or train models: one module each, importable as
``torch_mooncake.integrations.<name>``. A module imports its program only when one of its classes is used, so that
importing it needs nothing but torch_mooncake. ``docs/integrations.md`` has a page for each, and the recipe for another.
"""
