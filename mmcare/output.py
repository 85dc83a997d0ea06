from mmcare.files import check_writable, check_writable_file, moved_into_place  # noqa: F401 (until its users have moved)
