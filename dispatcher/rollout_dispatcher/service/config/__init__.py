"""What `dispatcher serve` can be told, each option declared once."""
