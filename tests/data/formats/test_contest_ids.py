import pytest

from klear_core.data.formats.fields import contest_id


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"platform": "atcoder", "question_id": "abc365_b"}, "atcoder/abc365_b"),
        ({"platform": "codeforces", "question_id": "1873_A"}, "codeforces/1873a"),
        ({"id": "1873/A"}, "codeforces/1873a"),
        ({"url": "https://codeforces.com/problemset/problem/1873/A"}, "codeforces/1873a"),
        ({"url": "https://codeforces.com/contest/1873/problem/A"}, "codeforces/1873a"),
        ({"url": "https://atcoder.jp/contests/abc365/tasks/abc365_b"}, "atcoder/abc365_b"),
        ({"link": "https://leetcode.com/problems/two-sum/description"}, "leetcode/two-sum"),
        ({"platform": "leetcode", "question_id": "2727", "question_title": "two-sum"}, "leetcode/two-sum"),
        ({"platform": "leetcode", "question_title": "Two Sum"}, "leetcode/two-sum"),
        ({"task_id": "two-sum", "entry_point": "Solution().twoSum"}, "leetcode/two-sum"),
        ({"task_id": "HumanEval/0", "entry_point": "has_close_elements"}, ""),
        ({"task_id": 601, "text": "Write a function"}, ""),
        ({"id": "aime25-0"}, ""),
        ({"id": 12}, ""),
        ({"url": "https://artofproblemsolving.com/wiki/index.php/2023_AMC_12A_Problems/Problem_1"}, ""),
        ({}, ""),
    ],
)
def test_a_contest_problem_has_one_name_in_all_sources(fields, name):
    assert contest_id(fields) == name
