# Purpose: the two commands, and more for those who work here. Each installs what it needs.

.PHONY: help demo pipeline-demo faults test test-all brokers bench lint docs clean
.PHONY: coverage
.PHONY: test-on-bookworm test-on-trixie test-on-forky

help: ## this text
	@sed -n 's/^\([a-z-]*\): ## /make \1	/p' $(MAKEFILE_LIST)

demo: ## real tasks wait in a real broker; a worker is killed, the broker restarted, nothing lost
	@dev/install.sh demo
	@exec .venv/bin/python -m dev.demo

pipeline-demo: ## forty thousand delayed tasks from Spark, and a report that proves them
	@dev/install.sh pipeline
	@exec .venv/bin/python -m dev.pipeline

faults: ## whatever breaks, nothing confirmed is lost; ARGS="cut" runs the scenarios of that name
	@dev/install.sh pipeline
	@exec .venv/bin/python -m dev.faults $(ARGS)

test: ## what a change can break: style, types, documentation, and tests on a private broker; ARGS="-k word" goes to pytest alone
	@dev/install.sh test
	@exec dev/test.sh $(ARGS)

test-all: ## the same, and what takes long and rarely breaks: kills of clusters, Spark's long stories, brokers old and new
	@dev/install.sh test
	@exec dev/test.sh --all

test-on-bookworm test-on-trixie test-on-forky: test-on-%: ## all tests on the RabbitMQ of one Debian release
	@root=$$(dev/unpack.sh $*) && RABBITMQ_ROOT=$$root exec $(MAKE) test-all

brokers: ## unpack RabbitMQ 3.10, 4.0 and 4.3, for the whole matrix: `tox`
	@exec dev/unpack.sh all

bench: ## measure everything, beside its peers, into the docs; ARGS=--quick only sees that it runs
	@dev/install.sh bench
	@exec .venv/bin/python -m benchmarks $(ARGS)

lint: ## style, types, the import contract and spelling
	@dev/install.sh test
	@PATH="$(CURDIR)/.venv/bin:$$PATH" exec dev/check.sh lint

docs: ## the documentation, into docs/_build/html
	@dev/install.sh docs
	@PATH="$(CURDIR)/.venv/bin:$$PATH" exec dev/check.sh docs docs/_build/html

coverage: ## what the last `make test-all` has covered of the mechanism, line by line, into htmlcov
	@exec .venv/bin/python -m coverage html --fail-under=0

clean: ## remove what these commands have made
	[ -L .venv ] || [ ! -e .venv/made-for ] || rm -rf .venv
	rm -rf .tox .coverage build dist docs/_build htmlcov .hypothesis .import_linter_cache .*_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
