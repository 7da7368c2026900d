"""Webhooks: events become messages, and messages are posted until they are accepted or given up.

``publishing`` turns events into deliveries, each in one transaction; ``sending`` posts what is due. Every admission
process does both; rows that one of them is working on are skipped by the others.
"""
