# The two commands of a newcomer are `make demo` and `make test`.
SHELL := /bin/bash
BIN := .venv/bin

.PHONY: help bootstrap engine demo demo-real test test-all mutation lint format docs dist audit zipapp lock captures clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

bootstrap: ## Make .venv from requirements.lock
	@scripts/bootstrap

engine: ## Install and start what the lab needs (Debian/Ubuntu, as root); say what to do elsewhere
	@scripts/docker-engine

demo: ## Provision three simulated GPU nodes, break one, and let validate find out which
	@$${PYTHON:-python3} scripts/demo.py

demo-real: ## Provision a lab node with NVIDIA's real driver from Debian, built for its kernel
	@$${PYTHON:-python3} scripts/demo_real.py

test: bootstrap ## What a change needs, of every tier that this machine can run
	@scripts/docker-engine || true
	@$(BIN)/python scripts/run_tests.py

test-all: bootstrap ## Every tier, every lab test, every scenario (hours on two cores)
	@scripts/docker-engine || true
	@$(BIN)/python scripts/run_tests.py --all

mutation: bootstrap ## Change the code that guards against lockout, loss and injection; tests must notice 90 % (PLACES=20)
	@$(BIN)/pip install --quiet --require-hashes -r scripts/mutation.txt
	@$(BIN)/python scripts/mutation_tests.py --places $(or $(PLACES),20)

lint: bootstrap ## ruff, mypy, yamllint, ansible-lint
	@$(BIN)/python scripts/run_tests.py --only lint

format: bootstrap ## Let ruff format the Python code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

docs: bootstrap ## Build the documentation as a site, in dist/docs/site
	@$(BIN)/python scripts/docs_site.py

dist: bootstrap ## Build the wheel and the sources in dist/, with their hashes; the same bytes each time
	@rm -f dist/*.whl dist/*.tar.gz dist/SHA256SUMS
	@$(BIN)/python -m hatchling build -d dist >/dev/null
	@cd dist && sha256sum *.whl *.tar.gz | tee SHA256SUMS

audit: bootstrap ## Look for known vulnerabilities of the dependencies, and for risks in the CI pipelines
	@$(BIN)/python scripts/audit.py

zipapp: bootstrap ## Build gpunode.pyz: gpunode as one file, to be copied to a node
	@$(BIN)/gpunode zipapp gpunode.pyz

lock: bootstrap ## Resolve requirements.lock and the locks of the role gpu_tools again
	@$(BIN)/pip install --quiet --require-hashes -r scripts/uv.txt
	@$(BIN)/uv pip compile pyproject.toml --extra dev --universal --generate-hashes --no-emit-index-url \
		--upgrade --quiet --output-file requirements.lock
	@for tool in py-spy tensorboard xprof; do \
		{ echo "# $$tool and what it needs, with hashes. Regenerate: make lock"; \
		echo "$$tool" | $(BIN)/uv pip compile - --universal --python-version 3.9 --generate-hashes --no-header \
		--no-annotate --no-emit-index-url --quiet; } > roles/gpu_tools/files/$$tool.txt; \
	done
	@{ echo "# What make mutation installs, with hashes. Regenerate: make lock"; \
		echo cosmic-ray==8.7.0 | $(BIN)/uv pip compile - --universal --python-version 3.11 --generate-hashes --no-header \
		--no-annotate --no-emit-index-url --quiet; } > scripts/mutation.txt
	@{ echo "# The generator of the site (make docs), with hashes. Regenerate: make lock"; \
		echo zensical | $(BIN)/uv pip compile - --universal --python-version 3.11 --generate-hashes --no-header \
		--no-annotate --no-emit-index-url --quiet; } > scripts/docs.txt
	@{ echo "# What writes sbom.cdx.json, and builds and audits, with hashes. Regenerate: make lock"; \
		printf '%s\n' build cyclonedx-bom pip-audit | $(BIN)/uv pip compile - --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --no-emit-index-url --quiet; } > scripts/sbom.txt
	@$(BIN)/python scripts/sbom.py

captures: bootstrap ## Download the recorded outputs that some tests need (GPUNODE_CAPTURES=DIR: from a folder)
	@GPUNODE_CAPTURES="$(GPUNODE_CAPTURES)" $(BIN)/python scripts/captures.py

clean: ## Remove what was built here (lab nodes: gpunode lab down)
	@rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
