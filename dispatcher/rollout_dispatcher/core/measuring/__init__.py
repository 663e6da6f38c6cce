"""What steps really took, as DP ranks report it: who waited for whom, and whose fault it was."""
