"""What Celery and Kombu need beyond a transport."""
