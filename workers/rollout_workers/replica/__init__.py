"""One DP rank of several processes: its leader hears the dispatcher, and tells its peers"""
