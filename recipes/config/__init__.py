"""Recipes: schema, validation, and lines in YAML files."""
