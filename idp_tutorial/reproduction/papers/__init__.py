"""The protocols and published scores of the papers, claims and transfer."""
