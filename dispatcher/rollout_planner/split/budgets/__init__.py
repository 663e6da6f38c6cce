"""Token budgets: how few micro-batches do, who trains on them, and none left empty."""
