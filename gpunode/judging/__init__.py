"""The room that judges: answers of nodes and a request in, reports on nodes out.

``evaluator.Evaluator(request).judge_fleet(answers)`` yields one result for each node, evaluated in a child process with
limits; ``request`` has what it judges by. Readers of what a request contains are modules of their own: ``policy``,
``expectation``; ``saved`` reads bundles from files, ``report`` is the document.
Nothing is loaded here: a scheduler's prolog waits for what it loads.
"""
