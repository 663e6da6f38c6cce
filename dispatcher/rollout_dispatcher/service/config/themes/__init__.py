"""The options by theme: each class is a heading of the help, each field an option."""
