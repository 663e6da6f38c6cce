"""Settings that change while it serves: asked for, judged as a whole, and put in force"""
