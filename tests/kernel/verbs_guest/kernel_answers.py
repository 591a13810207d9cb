"""What rxe0 answers to the questions of interop.answers, through rdmacm.kernel.verbs, as JSON."""

from __future__ import annotations

import json
import sys

from interop import answers
from kernel.verbs_guest.pair import open_context


def main(name: str) -> None:
    verbs = answers.ours()
    verbs.open = open_context
    questions = answers.Questions(verbs, name)
    questions.attributes()
    questions.completion_queues()
    questions.path_migration()
    questions.extended()
    questions.shared_receive_queues()
    questions.kernel_device()
    questions.pd.close()
    questions.context.close()
    print(json.dumps(questions.answers))


if __name__ == "__main__":
    main(sys.argv[1])
