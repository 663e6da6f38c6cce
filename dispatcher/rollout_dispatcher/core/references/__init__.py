"""Objects of payload stores: which are needed no more, and which worker releases them."""
