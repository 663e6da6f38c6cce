"""`LengthBucketSampler`: offline data in an order that balances ranks, resumable"""
