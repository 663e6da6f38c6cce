"""One DP rank of several processes: its leader receives from the dispatcher, and relays to peers"""
