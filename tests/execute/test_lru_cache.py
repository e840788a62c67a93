"""The least-recently-used cache."""

from lazyviz.execute.lru_cache import LRUCache


def test_what_was_used_least_recently_is_dropped_first():
    cache = LRUCache(2)
    cache["a"], cache["b"] = 1, 2
    assert cache.get("a") == 1
    cache["c"] = 3
    assert list(cache.values()) == [1, 3] and cache.get("b") is None
    assert cache.peek("a") == 1, "which is no use of it"
    cache["d"] = 4
    assert list(cache.values()) == [3, 4]
    cache.use("c")
    cache.use("gone")
    cache["e"] = 5
    assert list(cache.values()) == [3, 5]


def test_sizes_count_and_a_value_that_is_set_again_counts_once():
    dropped = []
    cache = LRUCache(10, size=len, on_drop=lambda key, value: dropped.append(key))
    cache["a"], cache["b"] = "xxxx", "xxxxx"
    cache["a"] = "xx"
    assert (cache.total, dropped) == (7, [])
    cache["c"] = "xxxx"
    assert (cache.total, dropped, list(cache.values())) == (6, ["b"], ["xx", "xxxx"])
    assert cache.pop("c") == "xxxx" and cache.pop("c") is None and cache.total == 2
    cache["big"] = "x" * 11
    assert (len(cache), cache.total) == (0, 0), "nothing is larger than the cache"
    cache["a"] = "x"
    cache.clear()
    assert (len(cache), cache.total) == (0, 0)


def test_a_value_may_be_kept_for_another_round():
    marked = {"a"}

    def keep(key, value):
        again = key in marked
        marked.discard(key)
        return again

    cache = LRUCache(2, on_drop=keep)
    cache["a"], cache["b"], cache["c"] = 1, 2, 3
    assert list(cache.values()) == [3, 1]
    cache["d"] = 4
    assert list(cache.values()) == [1, 4]
