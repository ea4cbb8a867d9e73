from weft.server.daemon.cli import main

raise SystemExit(main())
