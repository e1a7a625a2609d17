"""`python -m etcl_deploy` is `etcl`."""

from etcl_deploy.cli.main import main

main()
