"""How commands ask a running dispatcher over HTTP."""
