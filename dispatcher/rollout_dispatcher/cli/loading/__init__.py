"""Where options were written, and what is wrong with them, in words that show the place"""
