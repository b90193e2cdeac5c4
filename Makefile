# Purpose: the two commands, and three for those who work here. Each installs what it needs.

.PHONY: help demo test lint docs clean
.PHONY: test-on-bullseye test-on-bookworm test-on-trixie test-on-forky

help: ## this text
	@sed -n 's/^\([a-z]*\): ## /make \1	/p' $(MAKEFILE_LIST)

demo: ## real tasks wait in a real broker; a worker is killed, the broker restarted, nothing lost
	@lab/install.sh demo
	@exec .venv/bin/python -m lab.demo

test: ## the whole test suite, against a private broker; ARGS="-k word" goes to pytest
	@lab/install.sh test
	@exec .venv/bin/python -m pytest $(ARGS)

test-on-bullseye test-on-bookworm test-on-trixie test-on-forky: test-on-%:
	@root=$$(lab/unpack.sh $*) && RABBITMQ_ROOT=$$root exec $(MAKE) test

lint: ## style, types and the import contract
	@lab/install.sh test
	@exec .venv/bin/python -m pytest -q tests/unit/test_house.py -k style

docs: ## the documentation, into docs/_build/html
	@lab/install.sh docs
	@exec .venv/bin/python -m sphinx --fail-on-warning --keep-going docs docs/_build/html

clean: ## remove what these commands have made
	rm -rf .venv .tox build dist docs/_build .hypothesis .import_linter_cache .*_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
