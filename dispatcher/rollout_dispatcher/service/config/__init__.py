"""The options of `dispatcher serve`, each declared once."""
