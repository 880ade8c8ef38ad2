"""fitune: finds, keeps and explains the fastest tactic for every mixture-of-experts problem a GPU will meet."""
