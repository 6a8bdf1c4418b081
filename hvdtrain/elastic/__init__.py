"""Ranks that outlive others, and newcomers: how a run goes on in place as fewer, and as more again."""
