"""What is selected from a gradient, and what becomes of the rest."""
