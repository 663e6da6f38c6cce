"""The planner for trainers that run no service: lengths in, lists of indices out"""
