"""`dispatcher gc`: what lies in a payload store and nobody needs."""
