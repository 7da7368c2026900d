"""The dashboard: pages for people, over the public API, with the rights of the key they signed in with.

The pages come from Jinja templates, without data; JavaScript modules fill them from ``/v1`` and keep them live. A
session is a sealed cookie that holds the key. A page's requests carry the cookie in place of the key, so that there
is no second path to data: ``sessions`` puts the key where the edge expects it.
"""
