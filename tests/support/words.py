"""Words that help texts and metrics do without."""

import re

#: Words of our own, for which the field has others.
OWN_WORDS = re.compile(
    r"\b(told|tells?|said|says?|hungry|untold|skips|lots?|dealt|hears?|heard|held|whom?)\b"
)
