import sys

if sys.version_info < (3, 11):
    sys.exit(
        f"policy_server: the server needs Python 3.11, this is {sys.version.split()[0]}; robots need only `clients`"
    )
