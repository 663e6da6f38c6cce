"""What operators and their machines ask: metrics, health and status, in the form that they like."""
