from weft.server.cli import main

raise SystemExit(main())
