"""The lab: the product's own engine in virtual time, between simulated parts.

Only the policy server, the tools and the world model are simulated. Branches, gate and budget are those that run in
production, so what the lab says of a schedule it says of the code.
"""
