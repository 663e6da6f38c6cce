"""What one DP rank feeds to one forward and backward pass, from the bytes that came for it."""
