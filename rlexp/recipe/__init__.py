"""Recipes: list them, show one, copy one to start from. No torch."""
